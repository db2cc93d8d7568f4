-- Predicted nanoseconds of stages that are not done, by pool. Each active request stores its own share, packed; LEFT
-- has the sums of all shares. If a share or a sum is damaged, all sums are computed again, and the damaged share counts
-- as 0 until its next change.
local LEFT = P .. ':left'

-- Returns a stored share, by pool, or nil if it is damaged.
local function unpacked(share)
  local found = share and sound(cmsgpack.unpack, share)
  return type(found) == 'table' and found or nil
end

local function add(share)
  for pool, nanoseconds in pairs(share) do
    if call('HINCRBY', LEFT, pool, string.format('%.0f', nanoseconds)) == 0 then call('HDEL', LEFT, pool) end
  end
  return true
end

-- Replaces a share in the sums. Returns true, or raises if a sum is damaged.
local function exchange(was, is)
  local more = {}
  for pool, nanoseconds in pairs(was) do more[pool] = -nanoseconds end
  for pool, nanoseconds in pairs(is) do more[pool] = (more[pool] or 0) + nanoseconds end
  for pool, nanoseconds in pairs(more) do
    if nanoseconds == 0 then more[pool] = nil end
  end
  return add(more)
end

-- Returns the sum of a pool, or nil if it is damaged.
local function left_in(pool)
  local left = sound(call, 'HGET', LEFT, pool)
  if left == false then return '0' end
  return left and string.find(left, '^%d+$') and left
end

-- Computes all sums again from the shares of active requests.
local function recount()
  call('DEL', LEFT)
  for _, id in ipairs(call('ZRANGE', ACTIVE, 0, -1)) do
    local share = unpacked(sound(call, 'HGET', request_key(id), 'left'))
    if share then sound(add, share) end
  end
end

-- Returns the number of active requests, and for each pool the waiting tasks, the oldest age and the remaining work.
function verbs.stats()
  local lines = {}
  for _, pool in ipairs(A.pools) do
    if not left_in(pool) then
      recount()
      break
    end
  end
  for i, pool in ipairs(A.pools) do
    sound(ripen, pool)
    local oldest = 0
    for _, member in ipairs(sound(call, 'ZRANGE', ready_key(pool), 0, A.front - 1) or {}) do
      local pushed = tonumber(sound(call, 'HGET', task_of(member), 'pushed')) or wall
      oldest = math.max(oldest, wall - pushed)
    end
    lines[i] = {sound(size, pool) or 0, exact(oldest), left_in(pool)}
  end
  return {call('ZCARD', ACTIVE), lines}
end
