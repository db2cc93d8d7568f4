-- Nanoseconds that are still to be computed, by pool. Each active request keeps what it adds, packed, and the version
-- at which that was so; LEFT has the sums. An earlier version that works on this queue knows of none of it, but writes
-- the cost of all that is active with every context, without the mark by which this one says that the sums are right.
local LEFT, COUNTED = P .. ':left', ' '

local function is_counted(cost) return cost and string.sub(cost, -1) == COUNTED end

local function set_cost(cost, counted, before)
  local stored = exact(cost) .. (counted and COUNTED or '')
  if stored ~= before then call('HSET', META, 'cost', stored) end
end

-- What a request of that version adds; nothing where that was not counted since an earlier version changed it.
local function share_in(version, counted, left)
  local share = counted == version and left and sound(cmsgpack.unpack, left)
  return type(share) == 'table' and share or nil
end

local function share_of(id)
  local values = redis.pcall('HMGET', request_key(id), 'version', 'counted', 'left')
  if values.err or not values[1] then return {} end
  return share_in(unpack(values))
end

local function add(share)
  for pool, nanoseconds in pairs(share) do
    if call('HINCRBY', LEFT, pool, string.format('%.0f', nanoseconds)) == 0 then call('HDEL', LEFT, pool) end
  end
  return true
end

-- Takes one share for another; answers whether sums that were right still are.
local function exchange(was, is)
  local more = {}
  for pool, nanoseconds in pairs(was) do more[pool] = -nanoseconds end
  for pool, nanoseconds in pairs(is) do more[pool] = (more[pool] or 0) + nanoseconds end
  for pool, nanoseconds in pairs(more) do
    if nanoseconds == 0 then more[pool] = nil end
  end
  return add(more)
end

-- The sum of a pool; nothing where it is none.
local function left_in(pool)
  local left = sound(call, 'HGET', LEFT, pool)
  if left == false then return '0' end
  return left and string.find(left, '^%d+$') and left
end

-- Sums anew what is active; answers the requests whose share is not known.
local function recount()
  local unknown_shares = {}
  call('DEL', LEFT)
  for _, id in ipairs(call('ZRANGE', ACTIVE, 0, -1)) do
    local share = share_of(id)
    if not (share and sound(add, share)) then unknown_shares[#unknown_shares + 1] = id end
  end
  if #unknown_shares == 0 then set_cost(tonumber(call('HGET', META, 'cost')) or 0, true) end
  return unknown_shares
end

-- What a request adds, as who has read it says, if it is as it was then; one that cannot be read adds nothing.
function verbs.count()
  local version = sound(call, 'HGET', request_key(A.id), 'version')
  if version and (not A.counted or A.counted == version) then
    call('HSET', request_key(A.id), 'left', A.packed, 'counted', version)
  end
end

-- How many are active; of each pool the tasks that wait, when the first of them came, and what is left; and requests
-- whose share has to be counted before that is right.
function verbs.stats()
  local lines, is_right = {}, is_counted(call('HGET', META, 'cost'))
  for _, pool in ipairs(A.pools) do is_right = is_right and left_in(pool) end
  local unknown_shares = is_right and {} or recount()
  for i, pool in ipairs(A.pools) do
    sound(ripen, pool)
    local oldest = 0
    for _, member in ipairs(sound(call, 'ZRANGE', ready_key(pool), 0, A.front - 1) or {}) do
      local pushed, since = unpack(sound(call, 'HMGET', task_of(member), 'pushed', 'since') or {})
      local came = tonumber(pushed) or (tonumber(since) and wall - now + since) or wall
      oldest = math.max(oldest, wall - came)
    end
    lines[i] = {sound(size, pool) or 0, exact(oldest), left_in(pool)}
  end
  return {call('ZCARD', ACTIVE), lines, unknown_shares}
end
