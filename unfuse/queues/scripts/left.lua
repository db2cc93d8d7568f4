-- Predicted nanoseconds of stages that are not done, by pool. Each active request stores its own share, packed; LEFT
-- has the sums of all shares. If a share or a sum is damaged, all sums are computed again, and the damaged share counts
-- as 0 until its next change.
local LEFT = P .. ':left'

-- Returns a stored share, by pool, or nil if it is damaged.
local function unpacked(share)
  local by_pool = share and try(cmsgpack.unpack, share)
  return type(by_pool) == 'table' and by_pool or nil
end

local function add(share)
  for pool, nanoseconds in pairs(share) do
    if call('HINCRBY', LEFT, pool, string.format('%.0f', nanoseconds)) == 0 then call('HDEL', LEFT, pool) end
  end
  return true
end

-- Replaces a share in the sums. Returns true, or raises if a sum is damaged.
local function exchange(old_share, new_share)
  local change = {}
  for pool, nanoseconds in pairs(old_share) do change[pool] = -nanoseconds end
  for pool, nanoseconds in pairs(new_share) do change[pool] = (change[pool] or 0) + nanoseconds end
  for pool, nanoseconds in pairs(change) do
    if nanoseconds == 0 then change[pool] = nil end
  end
  return add(change)
end

-- Returns the sum of a pool, or nil if it is damaged.
local function remaining_in(pool)
  local sum = try(call, 'HGET', LEFT, pool)
  if sum == false then return '0' end
  return sum and string.find(sum, '^%d+$') and sum
end

-- Computes all sums again from the shares of active requests.
local function recount()
  call('DEL', LEFT)
  for _, id in ipairs(call('ZRANGE', ACTIVE, 0, -1)) do
    local share = unpacked(try(call, 'HGET', request_key(id), 'left'))
    if share then try(add, share) end
  end
end

-- Returns the number of active requests, and for each pool the waiting tasks, the oldest age and the remaining work.
function verbs.stats()
  local stats = {}
  for _, pool in ipairs(A.pools) do
    if not remaining_in(pool) then
      recount()
      break
    end
  end

  for i, pool in ipairs(A.pools) do
    try(release_due, pool)
    local oldest = 0
    for _, member in ipairs(try(call, 'ZRANGE', ready_key(pool), 0, A.front - 1) or {}) do
      local pushed = tonumber(try(call, 'HGET', task_of(member), 'pushed')) or wall
      oldest = math.max(oldest, wall - pushed)
    end
    stats[i] = {try(size, pool) or 0, exact(oldest), remaining_in(pool)}
  end
  return {call('ZCARD', ACTIVE), stats}
end
